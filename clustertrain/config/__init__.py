"""The tables of a recipe, a job and a cluster profile: frozen structs, and what checks them."""
