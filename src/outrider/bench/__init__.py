"""The measuring instrument: methods by tasks by temperatures by batch sizes, in turn, beside stock transformers.

tasks     prompts by name, from a folder, a hub or this package
peers     the ways to decode that are compared, each behind `run(prompts, ask) -> Answer`
runner    the grid, in turn, resumable
checks    what makes a method's figures invalid
metrics   samples -> figures with intervals
explain   where the distance between the measured and the ideal speed goes
report    results.json, results.csv, Markdown, report.html
"""
