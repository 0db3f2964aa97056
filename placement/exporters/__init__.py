"""A placement in the words of other tools: device maps, pipelines, JSON."""
