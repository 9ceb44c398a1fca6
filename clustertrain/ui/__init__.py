"""``clustertrain ui``: a live, read-only web page over all runs, on the loopback interface only."""
