"""One module per benchmark; `tools.bench` finds them by file name (its docstring says how)."""
