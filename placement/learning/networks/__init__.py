"""Parts of policies: networks, the features that they read, and compiled decoders."""
