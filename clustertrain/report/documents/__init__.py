"""The JSON documents of the commands: their types, how they are encoded, and their JSON Schemas."""
