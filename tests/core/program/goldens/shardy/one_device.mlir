// a single device: shardings say nothing
module @f attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<8x8xf32> {tf.aliasing_output = 0 : i32}, %arg1: tensor<8x8xf32> {tf.aliasing_output = 1 : i32}) -> (tensor<8x8xf32>, tensor<8x8xf32>) {
    return %arg0, %arg1 : tensor<8x8xf32>, tensor<8x8xf32>
  }
}
