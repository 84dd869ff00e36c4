"""Attribution of collectives to the constraint, argument or operation that causes them."""
