"""What one captured call becomes on the parts of its tensors that a rank has."""
