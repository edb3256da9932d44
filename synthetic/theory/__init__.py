"""Section 2 of the gating paper: a simplified SSM that memorises, retrieves, and forgets.

`explicit` is the model as the paper writes it, token by token; `short_context` and
`long_context` train the same model in closed form, many settings at once; `flow` holds the
paper's predictions; `panels` runs the four panels of the figure and `figure` draws them.
"""
