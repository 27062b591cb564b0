"""The SDK: from a method call to a settled future."""
