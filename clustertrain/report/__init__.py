"""Text, tables and pages for the terminal and the browser."""
