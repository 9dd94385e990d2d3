"""Lock backends; ``base`` is the contract, every other module fulfils it."""
