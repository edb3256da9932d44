"""Recall in fixed-state recurrences: cells, tasks, curricula and the tests between them.

`recurrences` holds the one state update that all cells share, plain and chunked; `cells` the
cells; `model` the harness around them; `tasks` the sequences and their honest floors;
`curriculum` the distance schedules; `runs` training and measurement; `table` every number of
the paper's summary beside ours.
"""
