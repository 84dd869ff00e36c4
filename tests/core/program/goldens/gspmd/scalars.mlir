// values without dimensions
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<f32> {mhlo.sharding = "{replicated}"}, %arg1: tensor<i1> {mhlo.sharding = "{replicated}"}) -> (tensor<f32> {mhlo.sharding = "{replicated}"}, tensor<i1>) {
    return %arg0, %arg1 : tensor<f32>, tensor<i1>
  }
}
