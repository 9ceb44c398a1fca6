"""Reading TOML documents into frozen structs: parsing, errors, suggestions, bounds."""
