"""Plan of an automatic layout: its report, its rules, and the function compiled with it."""
