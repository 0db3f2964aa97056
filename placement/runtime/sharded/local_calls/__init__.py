"""Local calls: a captured call on the parts of its tensors that a rank has."""
