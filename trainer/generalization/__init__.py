"""What a trained model's parameters say of how it generalizes: each measure in a file of its own, for any torch loss.

Source: Mądry, Optimization and Generalization Challenges in Deep Learning, lecture 3 of 6.S979; "Mądry's lecture"
in the modules.
"""
