"""Shell scripts, read without executing them: words, statements, and what is known of the variables."""
