"""Program as a graph: values with labelled dimensions, operations, and the memory of both."""
