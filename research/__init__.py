"""The research record: how ``gpumemnet`` compares with published work, and how shipped data came
about.

It imports the product, and the product never imports it; it is not in the wheel.
"""
