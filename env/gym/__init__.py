"""The Gymnasium environments in which agents place graphs."""
