"""What no strategy can beat: how far ops may be cut, what their copies take, and how long a pipeline takes to fill."""
