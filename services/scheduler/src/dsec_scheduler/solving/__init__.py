"""Which of the requests that wait gets which slices: the parts of the solver."""
