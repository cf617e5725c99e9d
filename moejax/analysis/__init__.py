"""What runs are turned into: contrasts, intervals, baselines. Needs the extra `stats`."""
