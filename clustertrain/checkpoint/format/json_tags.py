"""The keys of JSON objects that stand for what JSON lacks, in the values of a checkpoint."""

TENSOR, ARRAY, TUPLE, MAP, BYTES = "__tensor__", "__array__", "__tuple__", "__map__", "__bytes__"
FLOAT, INT = "__float__", "__int__"  # inf, -inf, nan; more than 64 bits
ALL = frozenset({TENSOR, ARRAY, TUPLE, MAP, BYTES, FLOAT, INT})
