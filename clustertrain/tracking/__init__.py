"""The process that uploads metrics to TensorBoard, W&B and MLflow."""
