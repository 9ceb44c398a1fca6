"""The classes of input. Each module draws some of them, and knows which commands take them."""
