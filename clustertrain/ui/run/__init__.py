"""The page of one run: what it shows, kept up to date from the run's files for all pages that are open."""
