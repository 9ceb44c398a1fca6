"""``clustertrain mcp``: the commands as tools for agents, over the Model Context Protocol."""
