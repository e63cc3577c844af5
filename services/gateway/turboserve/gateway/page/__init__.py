"""The pages for viewers and operators."""
