"""The four panels by letter: each fills a sweep's missing rows, then turns rows into numbers."""

from synthetic.theory.long_panels import run_c, run_d, summarise_c, summarise_d
from synthetic.theory.short_panels import run_a, run_b, summarise_a, summarise_b

RUN = {"a": run_a, "b": run_b, "c": run_c, "d": run_d}
SUMMARISE = {"a": summarise_a, "b": summarise_b, "c": summarise_c, "d": summarise_d}
