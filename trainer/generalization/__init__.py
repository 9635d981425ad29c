"""Measures of generalization computed from a trained model's parameters, one file each, for any torch loss.

Source: Mądry, Optimization and Generalization Challenges in Deep Learning, lecture 3 of 6.S979; "Mądry's lecture"
in the modules.
"""
