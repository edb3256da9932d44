"""One pipeline file, run on this machine or as Slurm jobs."""
