"""How long ops take on a device, and what they wait for the host that launches them."""
