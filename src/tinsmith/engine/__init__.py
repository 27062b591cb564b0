"""Where the numbers are made: the contract of an engine, and the engines that keep it."""
