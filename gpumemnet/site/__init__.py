"""What a site knows of its own jobs: observations, Slurm accounting, calibration and drift."""
