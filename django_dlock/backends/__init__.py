"""Lock backends: ``base`` is the contract, and every other module or package fulfils it."""
