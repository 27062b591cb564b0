"""An engine with arithmetic instead of a network: quick, exact, and true to the whole contract."""
