"""Other processes of this host: started, watched and ended."""
