"""The networks of the policies, what they see and what they propose."""
