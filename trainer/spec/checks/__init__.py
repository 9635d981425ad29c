"""What this version can run of what a spec can say; each refusal names the field and the remedy. Without torch.

Called while a spec is parsed; nobody else need.
"""
