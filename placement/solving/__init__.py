"""From a problem and a method's name to a `Result`."""
