"""`glm53 doctor`: what would go wrong at start or later, with the exact fix, before anything slow. It changes nothing.

Each service's checks import that service alone, so that its container needs no other's packages: `python -m cli.doctor --for cpu-expert`.
"""
