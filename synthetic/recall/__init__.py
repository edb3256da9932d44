"""Recall in fixed-state recurrences: cells, tasks, curricula and the tests between them.

`cells` holds the cells (their one state update is `gatewright.rank_one_scan`); `model` the
harness around them; `tasks` the sequences and their honest floors; `curriculum` the distance
schedules; `runs` training and measurement; `arms` the settings of the table; `table` every
number of the paper's summary beside ours.
"""
