"""The papers' controlled experiments: one command trains, measures, tests the claim and draws it.

Rooms shared by all experiments: `sweep` (resumable results.jsonl), `plots` (one style),
`ensemble` (models and settings that train together along a leading parameter axis).
Statistics are `gatewright.statistics`'.
"""
