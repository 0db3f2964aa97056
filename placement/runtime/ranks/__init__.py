"""One process for each device: `ProcessGroup`, how processes meet, start and fail, and the watchdog over them."""
