"""How long does a strategy take, and what does it hold, without making its graph? For choosing which to score."""
