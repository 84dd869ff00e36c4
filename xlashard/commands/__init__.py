"""What the commands of the command line do, where that stands on more than one room."""
