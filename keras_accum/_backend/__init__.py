"""What TensorFlow and Keras give no public way to do, by purpose.

Replicas, branches that run only sometimes, attributes that are put back; and what all
folders need: sizes in bytes, each object once. `private/` is the one folder that touches
private API.
"""
