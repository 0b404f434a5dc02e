"""The version of the product, here once for services and commands; pyproject.toml says the same, held by a test."""

VERSION = "0.1.0"
