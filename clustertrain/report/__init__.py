"""Reports: text and tables for the terminal, pages for the browser."""
