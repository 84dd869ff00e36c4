// values without dimensions
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=4]>
  sdy.mesh @empty_mesh = <[]>
  func.func public @main(%arg0: tensor<f32> {sdy.sharding = #sdy.sharding<@mesh, []>}, %arg1: tensor<i1> {sdy.sharding = #sdy.sharding<@empty_mesh, []>}) -> (tensor<f32> {sdy.sharding = #sdy.sharding<@empty_mesh, []>}, tensor<i1>) {
    return %arg0, %arg1 : tensor<f32>, tensor<i1>
  }
}
