"""Processes of this host: started together, listened to, looked at and ended."""
