"""Trainings with one setting changed, for the papers' ablations: `python -m papers.ablations.NAME`."""
